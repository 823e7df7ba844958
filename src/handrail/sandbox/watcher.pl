# What the first process of a sandbox does once the mounts have been compared: it watches the program, the mounts and the
# lifeline until one ends. launcher.pl evaluates this, so its variables are here.

sub facts {
    return map { my @is = split(/ /, $_, 7); $is[4] =~ m{^/proc/} ? () : ($is[0], "@is[4,1,2,5]") } split(/\n/, $_[0]);
}

# The mount point of a mount that is not there any more as it was; undef where all are. The kernel tells of a changed table
# only once, to whichever select asks first.
sub lost {
    my ($look) = @_;
    $look ||= @kept && !$moves;
    select(my $moved = $names, undef, my $altered = $tables, 0) > 0 or $look or return undef;
    while ($moves && sysread($moves, my $signal, 65536)) { $look = 1; }
    $look || vec($altered, fileno($table), 1) or return undef;
    my (%was, %is) = facts($first);
    %is = facts(table());
    my @lost;
    for my $id (keys(%was)) {
        my $now = delete($is{$id}) // "";
        next if $now eq $was{$id};
        my ($path, $other) = map { /^(\S+)/ ? $1 : "" } ($was{$id}, $now);
        # What is beneath a folder that was moved is elsewhere with it.
        while ($other ne $path && $path =~ m{^(.+)(/[^/]+)$} && substr($other, -length($2)) eq $2 && length($other) > length($2)) {
            ($path, $other) = ($1, substr($other, 0, -length($2)));
        }
        push(@lost, $path);
    }
    return (sort { length($a) <=> length($b) } map { plain($_) } @lost ? @lost : map { /^(\S+)/ } values(%is))[0];
}

my $ended = syscall(434, $program, 0);
$ended >= 0 or fail("the program cannot be watched: $!");
# The sandbox lives as long as its program, and no longer than whoever holds the other end of the lifeline.
close($_) for (*STDIN, *STDOUT, *STDERR, $host, $mail, $checked, $checking);
open(my $other, "<&=", $_) && close($other) for @others;
my $watched = $names;
vec($watched, $_, 1) = 1 for ($lifeline, $ended);
kill("CHLD", $$);    # goes once through what it will do later, so that the memory for it is there by then
my $told = 0;
for (;;) {
    my ($code, $lost);
    while ((my $gone = waitpid(-1, 1)) > 0) {
        next if $gone != $program;
        $code = ($? & 127) ? 128 + ($? & 127) : $? >> 8;
        last;
    }
    $lost = lost($told) if $table;
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
    # An orphan that ends just before this is seen the next time. Without word of moved names, they are looked for.
    my $patience = $moves || !@kept ? 1 : 0.05;
    my $count = select(my $ready = $watched, undef, my $altered = $tables, $patience);
    $told = $count > 0 && $table && vec($altered, fileno($table), 1);
    exit 129 if $count > 0 && vec($ready, $lifeline, 1);
}
