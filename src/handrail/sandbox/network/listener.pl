# Listens on a port inside the network namespace of a sandbox and hands the listening socket back; then it ends.
# In perl because it starts in a millisecond; listener_python.py does the same where there is no perl.
my ($user, $network, $channel, $setns, $sendmsg, $port) = map { $_ + 0 } @ARGV;
open(my $home, "+<&=", $channel);

sub fail {
    syswrite($home, "E" . join("", @_));
    exit 1;
}

syscall($setns, $user, 0x10000000) == 0 or fail("its user namespace cannot be entered: $!");
syscall($setns, $network, 0x40000000) == 0 or fail("its network namespace cannot be entered: $!");
socket(my $listener, 2, 1, 6) or fail("no socket could be made: $!");
setsockopt($listener, 0, 15, pack("i", 1));    # IP_FREEBIND: the loopback may not be up yet
bind($listener, pack("S n C4 x8", 2, $port, 127, 0, 0, 1)) or fail("port $port cannot be bound: $!");
listen($listener, 128) or fail("port $port cannot be listened on: $!");
my $byte = "l";
my $data = pack("P L!", $byte, 1);
my $rights = pack("L! i i i x4", 20, 1, 1, fileno($listener));    # SCM_RIGHTS, on a machine of 64 bits
my $message = pack("x8 L x4 P L! P L! i x4", 0, $data, 1, $rights, length($rights), 0);
syscall($sendmsg, $channel, $message, 0) == 1 or fail("the socket cannot be handed over: $!");
