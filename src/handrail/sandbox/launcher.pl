# The first process of a sandbox, in perl because every distribution has it and it starts in a millisecond.
# handrail.sandbox.launcher says what it reads and answers; launcher_python.py does the same where there is no perl.
# No module is loaded, and nothing is read but the descriptors that it is given and what /proc says of itself.
my ($channel, $letter, $lifeline, $spare, @others) = @ARGV;
open(my $host, "+<&=", $channel);
open(my $mail, "<&=", $letter);
open(my $life, "+<&=", $lifeline);
open(my $unused, "<&=", $spare) && close($unused);

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

my ($mode, $namespaces, $ruleset, $file_rights, $prlimit, $setsid, $inotify, @rest) = part();
my $count  = shift @rest;
my @limits = splice(@rest, 0, $count);    # resource and its struct rlimit64, by turns
$count = shift @rest;
my @rules = splice(@rest, 0, $count);     # kind, path or port, and rights, by turns
$count = shift @rest;
my @mounts = splice(@rest, 0, $count);    # parent, access, mount point and content, as one text each
$count = shift @rest;
my @kept = splice(@rest, 0, $count);      # paths that must keep their names

for my $space (split(/ /, $namespaces)) {
    my ($kind) = $space =~ /^(\w+):/;
    my $own = readlink("/proc/self/ns/$kind");
    (defined($own) && $own ne $space) or fail("it shares the $kind namespace of this machine");
}

# bubblewrap mounts by path, and a path can lead elsewhere a moment later. So every mount is compared with what was asked
# for, and from before that comparison on the kernel tells of each change: of the table, and of a name that is moved away.
sysopen(my $table, "/proc/self/mountinfo", 0x80000) or fail("its mounts cannot be read: $!");
my ($moves, %folders, %kept, %before);

sub without_escapes {
    my ($path) = @_;
    $path =~ s/\\([0-7]{3})/chr(oct($1))/ge if index($path, "\\") >= 0;
    return $path;
}

sub watch_names {
    my ($start, $add) = split(/ /, $inotify);
    my $descriptor = $start ? syscall($start + 0, 0x80800) : -1;    # IN_NONBLOCK | IN_CLOEXEC
    $descriptor >= 0 && open($moves, "<&=", $descriptor) or return;
    my %known;
    for my $path (@kept) {    # the outer first: what is swapped before its folder is watched is noticed in the folder above
        my ($folder) = $path =~ m{^(.*/)}s;
        $kept{$path} = 1;
        next if $known{$folder}++;
        my $number = syscall($add + 0, $descriptor, $folder, 0x01000040);    # IN_ONLYDIR | IN_MOVED_FROM
        push(@{$folders{$number}}, $folder);
        if ($number < 0) { close($moves); undef($moves); return; }
    }
}

sub table {
    my $text = "";
    sysseek($table, 0, 0);
    1 while sysread($table, $text, 65536, length($text));
    return map { [split(/ /, $_, 7)] } split(/\n/, $text);    # id, parent, device, root, point, options, the rest
}

sub misplaced {
    my (%wanted, %number, @found);
    push(@{$wanted{(split(/ /, $mounts[$_], 4))[2]}}, $_) for 0 .. $#mounts;
    for my $line (table()) {
        my ($id, $parent, $device, $point) = @$line[0, 1, 2, 4];
        $before{$id} = "$parent $device $point $$line[5]" unless $point =~ m{^/proc/};
        my $at = shift(@{$wanted{$point} || []});
        if (defined($at)) {
            $number{$id} = $at;
            $found[$at]  = $line;
        }
        elsif ($point !~ m{^/(?:proc/|dev/[^/]+$)}) {    # which bubblewrap fills itself, where nobody else can
            return $point;
        }
    }
    for my $at (0 .. $#mounts) {
        my ($parent, $access, $point, $content) = split(/ /, $mounts[$at], 4);
        my $line = $found[$at];
        if (!$line) {
            next if $content =~ /^=/ && $point =~ m{^/proc/};    # mounted and unmounted as it is used
            return $point;
        }
        return $point if $parent ne "-" && ($number{$$line[1]} // "") ne $parent;
        return $point if $access eq "ro" && $$line[5] !~ /^ro(?:,|$)/;
        next if $content eq "-";
        if ($content =~ /^=/) {
            return $point if $content ne "=$$line[2] $$line[3]";
            next;
        }
        my ($device, $inode) = stat(without_escapes($point));
        defined($device) or return $point;
        if ($content =~ /^\+(.*)/) {
            my ($major, $minor) = split(/:/, $$line[2]);
            my $shown = ($minor & 0xff) | (($major & 0xfff) << 8) | (($minor & ~0xff) << 12);
            return $point if $$line[6] !~ /(?:^|.* )- \Q$1\E / || $shown != $device;
        }
        elsif ($content ne "$device:$inode") {
            return $point;
        }
    }
    return undef;
}

# The mount point of a mount that is not there any more as it was; undef where all are.
sub lost {
    my ($names, $tables, $look) = ("", "", @kept && !$moves);
    vec($names,  fileno($moves), 1) = 1 if $moves;
    vec($tables, fileno($table), 1) = 1;
    my $changed = select(my $moved = $names, undef, my $altered = $tables, 0);
    return undef unless $changed > 0 || $look;
    while ($moves && sysread($moves, my $events, 65536)) {
        while (length($events)) {
            my ($number, $what, undef, $length) = unpack("lLLL", $events);
            my $name = unpack("Z*", substr($events, 16, $length));
            substr($events, 0, 16 + $length) = "";
            $look = 1 if $number < 0;    # there were too many of them
            for (@{$folders{$number} || []}) { return "$_$name" if $kept{"$_$name"}; }
        }
    }
    return undef unless $look || vec($altered, fileno($table), 1);
    my %left = %before;
    for my $line (table()) {
        my ($id, $parent, $device, undef, $point, $options) = @$line;
        next if $point =~ m{^/proc/};
        my $was = delete($left{$id});
        next if defined($was) && $was eq "$parent $device $point $options";
        return without_escapes(defined($was) ? (split(/ /, $was))[2] : $point);
    }
    my ($gone) = sort { $a <=> $b } keys(%left);
    return defined($gone) ? without_escapes((split(/ /, $left{$gone}))[2]) : undef;
}

if (@mounts) {
    watch_names();
    my $wrong = misplaced();
    if (defined($wrong)) {
        syswrite($host, "M" . without_escapes($wrong));
        exit 125;
    }
}

$SIG{CHLD} = sub { };
my $program = fork;
defined($program) or fail("no process could be made: $!");
if ($program) {
    # The sandbox lives as long as its program, and no longer than whoever holds the other end of the lifeline.
    my $ended = syscall(434, $program, 0);
    $ended >= 0 or fail("the program cannot be watched: $!");
    close($_) for (*STDIN, *STDOUT, *STDERR, $host, $mail);
    open(my $other, "<&=", $_) && close($other) for @others;
    my $watched = "";
    vec($watched, $_, 1) = 1 for ($lifeline, $ended, $moves ? fileno($moves) : ());
    my $tables = "";
    vec($tables, fileno($table), 1) = 1 if @mounts;
    kill("CHLD", $$);    # goes once through what it will do later, so that the memory for it is there by then
    for (;;) {
        my ($code, $lost);
        while ((my $gone = waitpid(-1, 1)) > 0) {
            next if $gone != $program;
            $code = ($? & 127) ? 128 + ($? & 127) : $? >> 8;
            last;
        }
        $lost = lost() if @mounts;
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
        select(my $ready = $watched, undef, my $altered = $tables, $patience) > 0 or next;
        exit 129 if vec($ready, $lifeline, 1);
    }
}
close($moves) if $moves;
close($table);
close($life);

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
