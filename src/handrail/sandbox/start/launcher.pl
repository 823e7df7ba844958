# The first process of a sandbox, in perl because every distribution has it and it starts in a millisecond.
# handrail.sandbox.start.launcher says what it reads and answers; launcher_python.py does the same where there is no perl.
# No module is loaded, and nothing is read but the descriptors that it is given and what /proc says of itself. Each
# statement takes microseconds to compile. So the first arguments are describer.pl and watcher.pl, which are compiled while
# the program's process restricts itself, and mount_changes.pl, which is seldom needed.
my ($describer, $watcher, $changes, $channel, $letter, $lifeline, $spare, @others) = @ARGV;
open(my $host, "+<&=", $channel);
open(my $mail, "<&=", $letter);
open(my $life, "+<&=", $lifeline);
if (open(my $unused, "<&=", $spare)) { close($unused); }

sub fail {
    syswrite($host, "E" . join("", @_));
    exit 125;
}

sub part {
    my ($length, $text) = ("", "");
    (sysread($mail, $length, 4) || 0) == 4 or fail("the letter is cut");
    $length = unpack("N", $length);
    while (length($text) < $length) {
        sysread($mail, $text, $length - length($text), length($text)) or fail("the letter is cut");
    }
    return unpack("(N/a*)*", $text);
}

my ($mode, $namespaces, $ruleset, $file_rights, $prlimit, $setsid, $capset, $signals, @rest) = part();
my $count  = shift @rest;
my @counts = splice(@rest, 0, $count);    # a setting of this user namespace and its number, by turns
$count = shift @rest;
my @limits = splice(@rest, 0, $count);    # resource and its struct rlimit64, by turns
$count = shift @rest;
my @rules = splice(@rest, 0, $count);     # kind, path or port, and rights, by turns
$count = shift @rest;
my @looked = splice(@rest, 0, $count);    # paths whose device and inode the holder compares
$count = shift @rest;
my @folders = splice(@rest, 0, $count);   # folders in which names must stay

for my $space (split(/ /, $namespaces)) {
    my ($kind) = $space =~ /^(\w+):/;
    my $own = readlink("/proc/self/ns/$kind");
    (defined($own) && $own ne $space) or fail("it shares the $kind namespace of this machine");
}

# The bounds that only the namespace's settings have; where they cannot be written, doctor says so.
while (my ($setting, $number) = splice(@counts, 0, 2)) {
    my $file;
    sysopen($file, $setting, 1) and syswrite($file, $number);
}
# The one capability in this namespace is of no more use: nothing that is made from here on has it.
my ($version, $none) = (pack("L l", 0x20080522, 0), pack("L6", (0) x 6));
syscall($capset + 0, $version, $none) == 0 or fail("its capability cannot be given up: $!");

pipe(my $checked, my $checking) or fail("it has no pipe: $!");
$SIG{CHLD} = sub { };
my $program = fork;
defined($program) or fail("no process could be made: $!");
if ($program) {
    my ($tables, $moves, $polled, $table, $first, @open) = ("", -1, 0);
    eval(qq{#line 1 "describer.pl"\n$describer}) // fail("its mounts cannot be described: $@") if @looked;
    syswrite($checking, "c");
    eval(qq{#line 1 "watcher.pl"\n$watcher}) // fail("it cannot be watched: $@");
}
close($_) for ($life, $checking);

# Where the machine runs out of memory, the kernel takes it from sandboxes first.
my $score;
sysopen($score, "/proc/self/oom_score_adj", 1) and syswrite($score, "500") and close($score);

if (length($ruleset)) {
    my $set = syscall(444, $ruleset, length($ruleset), 0);
    $set >= 0 or fail("Landlock cannot be used: $!");
    while (my ($kind, $what, $rights) = splice(@rules, 0, 3)) {
        if ($kind eq "port") {
            my $rule = $rights . $what;
            syscall(445, $set, 2, $rule, 0) == 0 or fail("no Landlock rule can be made for a port: $!");
            next;
        }
        sysopen(my $place, $what, 0x280000) or next;    # O_PATH | O_CLOEXEC; what is not there needs no rule
        $rights &= $file_rights unless -d $place;
        my $rule = $rights . pack("l", fileno($place));
        syscall(445, $set, 1, $rule, 0) == 0 or fail("no Landlock rule can be made for $what: $!");
    }
    syscall(446, $set, 0) == 0 or fail("Landlock cannot be put into force: $!");
}
while (my ($resource, $bounds) = splice(@limits, 0, 2)) {
    syscall($prlimit + 0, 0, $resource + 0, $bounds, 0) == 0 or fail("limit $resource cannot be set: $!");
}
if ($setsid) {
    (syscall($setsid + 0) >= 0 && ioctl(STDIN, 0x540E, 0)) or fail("it gets no terminal of its own: $!");    # TIOCSCTTY
}

(sysread($checked, my $word, 1) || 0) == 1 or exit 125;
close($checked);

if ($mode eq "shell") {
    my $script = shift @rest;
    %ENV = @rest;
    fcntl($_, 2, 0) for ($host, $mail);
    exec { "/bin/bash" } "/bin/bash", "--noprofile", "--norc", "-c", $script, "/bin/bash";
    fail("/bin/bash cannot be started: $!");
}
syswrite($host, "r");
(sysread($host, my $go, 1) || 0) == 1 or exit 125;
(my $folder, $count, my @given) = part();
chdir($folder) or fail("$folder cannot be entered: $!");
my @program = splice(@given, 0, $count);
%ENV = @given;
fcntl($_, 2, 1) for ($host, $mail);
syswrite($host, "x");
{ exec { $program[0] } @program; }
my $error = $! + 0;
syswrite($host, "L") if $error == 7;
my %said = (2 => "command not found", 7 => "its arguments are too long", 8 => "not a program", 13 => "permission denied");
syswrite(STDERR, "$program[0]: " . ($said{$error} || $!) . "\n");
exit($error == 2 ? 127 : 126);
