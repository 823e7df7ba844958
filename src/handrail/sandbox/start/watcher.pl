# What the first process of a sandbox does once its mounts have been described: it watches the program, the mounts and the
# lifeline until one ends. launcher.pl evaluates this, so its variables are here.

my $ended = syscall(434, $program, 0);
$ended >= 0 or fail("the program cannot be watched: $!");
# The sandbox lives as long as its program, and no longer than whoever holds the other end of the lifeline.
close($_) for (*STDIN, *STDOUT, *STDERR, $host, $mail, $checked, $checking);
open(my $other, "<&=", $_) && close($other) for @others;
my $watched = "";
vec($watched, $_, 1) = 1 for ($lifeline, $ended, $moves >= 0 ? $moves : ());
$polled ||= @folders && $moves < 0;
kill("CHLD", $$);    # goes once through what it will do later, so that the memory for it is there by then
for (;;) {
    my ($code, $lost);
    while ((my $gone = waitpid(-1, 1)) > 0) {
        $code = ($? & 127) ? 128 + ($? & 127) : $? >> 8 if $gone == $program;
    }
    # An orphan that ends just before this is seen the next time. Without word of moved names, they are looked for.
    my $patience = defined($code) ? 0 : $polled ? 0.05 : 1;
    my $count = select(my $ready = $watched, undef, my $altered = $tables, $patience);
    my $told = $count > 0 && $table && vec($altered, fileno($table), 1);    # the kernel reports this once
    if ($told || $polled || $count > 0 && $moves >= 0 && vec($ready, $moves, 1)) {
        defined(&lost) || eval(qq{#line 1 "mount_changes.pl"\n$changes}) || exit(125);
        $lost = lost($told || $polled);
    }
    if (defined($code) || defined($lost)) {
        # Whoever lives here is a child of this process, or of somebody's who is: without one, nobody is left.
        if (waitpid(-1, 0x40000001) != -1) {    # __WALL | WNOHANG
            kill(9, -1);                        # everybody but this process
            1 while waitpid(-1, 0x40000000) > 0;
        }
        $code = 137 if defined($lost);
        syswrite($life, chr($code) . ($lost // ""));
        exit $code;
    }
    exit 129 if $count > 0 && vec($ready, $lifeline, 1);
}
