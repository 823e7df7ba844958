# The resident first process of a template, from which sandboxes are made. bubblewrap has made its mounts once. For each
# request this process makes a child in new namespaces, which prepares its own view and continues with launcher.pl.
# Handrail appends that text to this one, so that it is compiled once. sandbox_template.py says what a request has.
#
# Nothing of a call is read here but its descriptors, and the child closes every descriptor that is not the call's.
{
    my ($changes, $requests, $numbers, $filter, $user, $group, $own_network, $sealed, $tmp, $shm, $start, $count, @inner) = @ARGV;
    $requests += 0;    # syscall takes a text for an address
    my %number = split(/ /, $numbers);
    my @system = splice(@inner, 0, $count);    # mount points in /proc; the others are in /tmp
    my ($answer, $maps, %ours, @ways) = ($requests);
    $filter = pack("H*", $filter);
    my $spaces = 0x2E020000 | ($own_network ? 0x40000000 : 0);    # CLONE_NEW of mounts, pids, IPC, UTS and control groups
    my @kinds = ("mnt", "pid", "ipc", "uts", "user", $own_network ? "net" : ());

    sub refuse {
        open(my $told, "+<&=", $answer);
        syswrite($told, "E" . join("", @_));
        exit 125;
    }

    sub request {
        my ($name, @values) = @_;
        my $result = syscall($number{$name} + 0, @values);
        $result >= 0 or refuse("$name fails: $!");
        return $result;
    }

    sub hold {
        my ($point) = @_;
        sysopen(my $place, $point, 0x2A0000) or refuse("$point cannot be found: $!");    # O_PATH | O_NOFOLLOW | O_CLOEXEC
        return $place;
    }

    sub move {
        my ($place, $point) = @_;
        request("move_mount", fileno($place), "", -100, $point, 4);
    }

    sub write_setting {
        my ($name, $text) = @_;
        my $file;
        (sysopen($file, $name, 1) && syswrite($file, $text)) or refuse("$name cannot be written: $!");
    }

    # Makes the mount point of what was mounted in the template's /tmp, in the private /tmp.
    sub make_point {
        my ($point, $place, @folders) = @_;
        for my $folder (@folders) {
            my ($name, $mode) = @$folder;
            -d $name or mkdir($name, $mode) or refuse("$name cannot be made: $!");
        }
        -d $place ? mkdir($point, 0755) : sysopen(my $file, $point, 0xC1, 0444) or refuse("$point cannot be made: $!");
    }

    # The folders between /tmp and a mount point, with the modes that bubblewrap gave them.
    sub way {
        my ($folder, @names) = ("/tmp", split(m{/}, substr($_[0], 5)));
        pop(@names);
        return map { $folder .= "/$_"; [$folder, (stat($folder))[2] & 07777] } @names;
    }

    # Gives a new child the view, the user namespace and the filter of a sandbox. From its user namespace on, the child has no
    # right over its other namespaces: they belong to the template's user namespace, where this process is root.
    sub prepare {
        request("setsid");
        my @below = map { hold("/dev/shm" . substr($_, 5)) } @system;
        my @within = map { hold($_) } @inner;
        request("mount", "proc", "/proc", "proc", 14, 0);
        move($below[$_], $system[$_]) for (0 .. $#system);
        request("mount", "none", "/proc", 0, 0x102F, 0) if $sealed;
        request("umount2", "/dev/shm", 2);
        request("mount", "tmpfs", "/dev/shm", "tmpfs", 6, "mode=1777,size=$shm");
        request("mount", "tmpfs", "/tmp", "tmpfs", 6, "mode=1777,size=$tmp");
        request("mount", "devpts", "/dev/pts", "devpts", 10, "newinstance,ptmxmode=0666,mode=620");
        my $mask = umask(0);
        for my $at (0 .. $#inner) {
            make_point($inner[$at], $within[$at], @{ $ways[$at] });
            move($within[$at], $inner[$at]);
        }
        umask($mask);
        if ($own_network) {
            my ($socket, $up) = (undef, pack("a16 s x22", "lo", 1));
            (socket($socket, 2, 2, 0) && ioctl($socket, 0x8914, $up)) or refuse("the loopback cannot be started: $!");
        }
        request("unshare", 0x10000000);
        request("fchdir", $maps);
        write_setting("self/setgroups", "deny");
        write_setting("self/uid_map",   "$user 0 1");
        write_setting("self/gid_map",   "$group 0 1");
        write_setting("sys/user/max_user_namespaces", "0");
        chdir($start) or refuse("$start cannot be entered: $!");
        for my $capability (0 .. 63) {
            next if syscall($number{prctl} + 0, 24, $capability, 0, 0, 0) == 0;    # PR_CAPBSET_DROP
            $! == 22 or refuse("the capability $capability cannot be given up: $!");
            last;
        }
        my $resource = 1 << 24;    # CAP_SYS_RESOURCE, with which launcher.pl writes its settings
        request("capset", pack("L l", 0x20080522, 0), pack("L6", $resource, $resource, (0) x 4));
        for my $kind (@kinds) {
            my $own = readlink("/proc/self/ns/$kind");
            (defined($own) && $own ne $ours{$kind}) or refuse("it shares the $kind namespace of its template");
        }
        request("seccomp", 1, 0, pack("S x6 P", length($filter) / 8, $filter)) if length($filter);
    }

    # Gives the received descriptors the numbers of the call, and closes all others.
    sub arrange {
        my ($received, $wanted) = @_;
        my ($next, @sorted) = (0, sort { $a <=> $b } @$wanted);
        my @copies = map { request("fcntl", $_, 1030, $sorted[-1] + 1) } @$received;    # F_DUPFD_CLOEXEC
        for my $at (0 .. $#copies) { request("dup3", $copies[$at], $wanted->[$at], 0); }
        for my $kept (@sorted) {
            request("close_range", $next, $kept - 1, 0) if $next < $kept;
            $next = $kept + 1;
        }
        request("close_range", $next, 0xFFFFFFFF, 0);
    }

    $ours{$_} = readlink("/proc/self/ns/$_") // refuse("its namespaces are unknown: $!") for @kinds;
    @ways = map { [way($_)] } @inner;
    # Its /proc without what is mounted on it, for the files of a child's user namespace. A child's own may be read-only.
    $maps = request("open_tree", -100, "/proc", 0x80001);
    # The kernel lets a child mount a /proc only if it sees another one, so that one is put out of the way.
    request("mount", "/proc", "/dev/shm", 0, 0x2000, 0);
    request("umount2", "/dev/pts", 2);
    # From here on, its mounts change only if one ends.
    sysopen(my $table, "/dev/shm/self/mountinfo", 0x80000) or refuse("its mounts cannot be read: $!");
    my $mounts = request("fcntl", fileno($table), 1030, 3);
    close($table);

    my $trial = request("clone", $spaces | 17, 0, 0, 0, 0);
    if ($trial == 0) {
        prepare();
        arrange([0, 1, 2], [0, 1, 2]);
        exit 0;
    }
    (waitpid($trial, 0) == $trial && $? == 0) or exit 125;
    $SIG{CHLD} = "IGNORE";
    my ($watched, $tables) = ("", "");
    vec($watched, $requests, 1) = 1;
    vec($tables,  $mounts,   1) = 1;
    open(my $holder, "+<&=", request("fcntl", $requests, 1030, 3));
    (syswrite($holder, "r") && close($holder)) or exit 125;
    for (;;) {
        my ($text, $given, @received, @wanted) = ("\0" x 1024, "\0" x 1024);
        my $altered = $tables;
        select(my $asked = $watched, undef, $altered, undef) > 0 or next;
        my $length = 0;
        if (!vec($altered, $mounts, 1)) {
            (vec($text, 1023, 8), vec($given, 1023, 8)) = (0, 0);
            my $parts   = pack("P L!", $text, length($text));
            my $message = pack("x8 L x4 P L! P L! i x4", 0, $parts, 1, $given, length($given), 0);
            $length = syscall($number{recvmsg} + 0, $requests, $message, 0x40000000);    # MSG_CMSG_CLOEXEC
        }
        if ($length <= 0) {
            # A mount has ended, or nobody asks for more. The sandboxes that were made stay until their programs end.
            syscall($number{close_range} + 0, $requests + 0, $requests + 0, 0);
            1 while waitpid(-1, 0) > 0;
            exit 0;
        }
        my ($size) = unpack("L!", $given);
        @received = unpack("x16 i" . int(($size - 16) / 4), $given) if $size > 16;
        my ($channel, $letter, $lifeline, $many, @others) = unpack("l*", substr($text, 0, $length));
        @wanted = splice(@others, 0, $many);
        my $child = @wanted && @received == @wanted ? syscall($number{clone} + 0, $spaces | 17, 0, 0, 0, 0) : -1;
        my ($at) = grep { $wanted[$_] == $channel } (0 .. $#received);
        if ($child == 0) {
            $SIG{CHLD} = "DEFAULT";
            $answer = $received[$at];
            prepare();
            arrange(\@received, \@wanted);
            @ARGV = ("", "", $changes, $channel, $letter, $lifeline, -1, @others);
            last;
        }
        if ($child < 0 && defined($at)) {
            my ($told, $why) = (undef, "Eno process could be made: $!");
            open($told, "+<&=", $received[$at]) && syswrite($told, $why);
        }
        syscall($number{close_range} + 0, $_, $_, 0) for @received;
    }
}
