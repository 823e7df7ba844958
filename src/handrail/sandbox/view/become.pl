# Becomes an ordinary user and then bubblewrap. Run by real root only; handrail.sandbox.view.identity says what it is given.
# Folders that the user cannot get to are first mounted where they can be got at, in a mount namespace of its own.
my ($unshare, $mount, $setgroups, $setresgid, $setresuid, $uid, $gid, $stage, $count, @rest) = @ARGV;
my @sources = splice(@rest, 0, $count);

sub fail {
    my $why = $!;
    print STDERR "bwrap: cannot become user $uid: @_: $why\n";
    exit 1;
}

if ($count) {
    syscall($unshare + 0, 0x20000) == 0 or fail("no mount namespace");
    syscall($mount + 0, my $none = "none", my $root = "/", 0, 0x44000, 0) == 0 or fail("the mounts stay shared");
    my @held;
    for my $source (@sources) {
        sysopen(my $place, $source, 0x280000) or fail($source);    # O_PATH | O_CLOEXEC
        push @held, $place;
    }
    my ($kind, $options) = ("tmpfs", "mode=0755");
    syscall($mount + 0, $kind, $stage, $kind, 6, $options) == 0 or fail("no folder for mounts");
    for my $number (0 .. $#held) {
        my ($from, $to) = ("/proc/self/fd/" . fileno($held[$number]), "$stage/$number");
        -d $held[$number] ? mkdir($to, 0755) : sysopen(my $file, $to, 0x40, 0644);
        syscall($mount + 0, $from, $to, 0, 0x5000, 0) == 0 or fail("cannot mount $sources[$number]");
    }
}
chdir("/");
syscall($setgroups + 0, 0, 0) == 0             or fail("groups");
syscall($setresgid + 0, ($gid + 0) x 3) == 0   or fail("group $gid");
syscall($setresuid + 0, ($uid + 0) x 3) == 0   or fail("user");
{ exec { $rest[0] } @rest[1 .. $#rest]; }
fail("cannot start $rest[0]");
