# What the first process of a sandbox says of its mounts, and how it hears that they change. launcher.pl evaluates this in the
# process that watches, while the program's restricts itself, so its variables are here.
#
# bubblewrap mounts by path, and a path can lead elsewhere a moment later. So the holder compares the mounts with those that
# were asked for. From before that on the kernel reports each change: of the table, and renames in the folders.

sub table {
    my $text = "";
    sysseek($table, 0, 0);
    1 while sysread($table, $text, 65536, length($text));
    return $text;
}

sysopen($table, "/proc/self/mountinfo", 0x80000) or fail("its mounts cannot be read: $!");
vec($tables, fileno($table), 1) = 1;
# The kernel reports a rename by SIGIO, which is read like a file. Unlike inotify's, the number of these is not bounded for
# the user, whose editors have inotify.
my ($mask, $start) = split(/ /, $signals);
my $set = pack("Q", 1 << 28);    # SIGIO
$moves = syscall($start + 0, -1, $set, 8, 0x80800) if @folders && $start && syscall($mask + 0, 0, $set, 0, 8) == 0;
for my $name (@folders) {
    my $folder;
    sysopen($folder, $name, 0x80000) && fcntl($folder, 1026, 0x80000010) or $polled = 1;    # F_NOTIFY, each rename
    push(@open, $folder);
}
$first = table();
syswrite($host, "T" . pack("N/a*", pack("(N/a*)*", $first, map { join(":", (stat)[0, 1]) } @looked)));

1;
