# What the first process of a sandbox does while the program's process, its child, restricts itself: it compares the mounts,
# and then lets the child go on. launcher.pl evaluates this and then watcher.pl, so its variables are here.

# bubblewrap mounts by path, and a path can lead elsewhere a moment later. So every mount is compared with what was asked
# for, and from before that comparison on the kernel tells of each change: of the table, and of a name that is moved away.

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

if (%mounts) {
    sysopen($table, "/proc/self/mountinfo", 0x80000) or fail("its mounts cannot be read: $!");
    vec($tables, fileno($table), 1) = 1;
    # The kernel tells of a rename by SIGIO, which is read like a file. Unlike inotify's, the number of these is not bounded for
    # the user, whose editors have inotify.
    my ($mask, $start) = split(/ /, $signals);
    my $set = pack("Q", 1 << 28);    # SIGIO
    my $watch = @kept && $start && syscall($mask + 0, 0, $set, 0, 8) == 0 ? syscall($start + 0, -1, $set, 8, 0x80800) : -1;
    open($moves, "<&=", $watch) if $watch >= 0;    # SFD_NONBLOCK | SFD_CLOEXEC
    for my $path (@kept) {    # the outer first: what is swapped before its folder is watched is noticed in the folder above
        my $name = substr($path, 0, rindex($path, "/") + 1);
        next if !$moves || $names{$name}++;
        my $folder;
        sysopen($folder, $name, 0x90000) && fcntl($folder, 1026, 0x80000010) or undef($moves);    # F_NOTIFY, each rename
        push(@folders, $folder);
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
