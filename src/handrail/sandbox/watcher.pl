# What the first process of a sandbox does while the program's process, its child, restricts itself and becomes the program:
# it compares the mounts, lets the child go on, and then watches the program, the mounts and the lifeline until one ends.
# launcher.pl evaluates this, so its variables are here: $host, $mail, $life, $lifeline, @others, $program, $checked,
# $checking, %mounts, @kept, %passed and $inotify.
# bubblewrap mounts by path, and a path can lead elsewhere a moment later. So every mount is compared with what was asked
# for, and from before that comparison on the kernel tells of each change: of the table, and of a name that is moved away.
my ($table, $tables, $first, $moves, $names, %folders, %names, %kept) = (undef, "", "", undef, "");

sub table {
    my $text = "";
    sysseek($table, 0, 0);
    1 while sysread($table, $text, 65536, length($text));
    return $text;
}

sub plain {
    my ($path) = @_;
    $path =~ s/\\([0-7]{3})/chr(oct($1))/ge if index($path, "\\") >= 0;
    return $path;
}

sub misplaced {
    my %places;
    for (split(/\n/, $first)) {
        my ($id, $parent, $device, $root, $point, $options) = split(/ /, $_, 7);
        my $place = $point;
        $place .= "\n" while !exists($mounts{$place}) && exists($mounts{"$place\n"});
        if (!exists($mounts{$place})) {
            next if $point =~ m{^/(?:proc|dev)/};    # which bubblewrap fills itself, where nobody else can
            return $point;
        }
        my ($on, $access, $content) = split(/ /, delete($mounts{$place}), 3);
        $places{$id} = $place;
        index($options, $access) == 0 && ($on eq "-" || $on eq ($places{$parent} // "")) or return $point;
        if (index($content, "=") == 0) {
            $content eq "=$device $root" or return $point;
        }
        elsif ($content ne "-") {
            my ($shown, $inode) = stat(plain($point)) or return $point;
            next if $content eq "$shown:$inode";
            my ($major, $minor) = split(/:/, $device);    # of a file system that was made for this sandbox
            $content eq "+" && $major == 0 && $shown == ($minor & 255 | ($minor & ~255) << 12) or return $point;
        }
    }
    for my $folder (keys(%passed)) {
        my ($shown, $inode) = stat($folder) or return $folder;
        $passed{$folder} eq "$shown:$inode" or return $folder;
    }
    for my $place (keys(%mounts)) {    # what is in /proc is mounted and unmounted as it is used
        return $place unless $place =~ m{^/proc/} && $mounts{$place} =~ / =/;
    }
    return undef;
}

sub facts {
    return map { my @is = split(/ /, $_, 7); $is[4] =~ m{^/proc/} ? () : ($is[0], "@is[4,1,2,5]") } split(/\n/, $_[0]);
}

# The mount point of a mount that is not there any more as it was; undef where all are. The kernel tells of a changed table
# only once, to whichever select asks first.
sub lost {
    my ($look) = @_;
    $look ||= @kept && !$moves;
    select(my $moved = $names, undef, my $altered = $tables, 0) > 0 or $look or return undef;
    while ($moves && sysread($moves, my $events, 65536)) {
        while (length($events)) {
            my ($number, undef, undef, $length) = unpack("lLLL", $events);
            my $name = unpack("x16 Z*", substr($events, 0, 16 + $length, ""));
            $look = 1 if $number < 0;    # there were too many of them
            for (@{$folders{$number} || []}) { return "$_$name" if $kept{"$_$name"}; }
        }
    }
    $look || vec($altered, fileno($table), 1) or return undef;
    my (%was, %is) = facts($first);
    %is = facts(table());
    for my $id (keys(%was)) {
        my $now = delete($is{$id}) // "";
        return plain($was{$id} =~ /^(\S+)/) if $now ne $was{$id};
    }
    return (map { plain(/^(\S+)/) } values(%is))[0];
}

my $ended = syscall(434, $program, 0);
$ended >= 0 or fail("the program cannot be watched: $!");
if (%mounts) {
    sysopen($table, "/proc/self/mountinfo", 0x80000) or fail("its mounts cannot be read: $!");
    vec($tables, fileno($table), 1) = 1;
    my ($start, $add) = split(/ /, $inotify);
    my $watch = @kept && $start ? syscall($start + 0, 0x80800) : -1;    # IN_NONBLOCK | IN_CLOEXEC
    open($moves, "<&=", $watch) if $watch >= 0;
    for my $path (@kept) {    # the outer first: what is swapped before its folder is watched is noticed in the folder above
        my $folder = substr($path, 0, rindex($path, "/") + 1);
        $kept{$path} = 1;
        next if !$moves || $names{$folder}++;
        my $number = syscall($add + 0, $watch, $folder, 0x01000040);    # IN_ONLYDIR | IN_MOVED_FROM
        push(@{$folders{$number}}, $folder);
        undef($moves) if $number < 0;
    }
    vec($names, $watch, 1) = 1 if $moves;
    $first = table();
    my $wrong = misplaced();
    if (defined($wrong)) {
        syswrite($host, "M" . plain($wrong =~ s/\n+$//r));
        exit 125;
    }
}

syswrite($checking, "c");

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
