# Which mount of a sandbox has ended. watcher.pl evaluates this once the kernel has told of a changed mount table or of a
# moved name, so its variables are here.

my (%places, %kept);
push(@{$places{$numbers[$_]}}, $folders[$_]) for (0 .. $#folders);
$kept{$_} = 1 for @kept;
open(my $moved, "<&=", $moves) if $moves >= 0;

sub facts {
    return map { my @is = split(/ /, $_, 7); $is[4] =~ m{^/proc/} ? () : ($is[0], "@is[4,1,2,5]") } split(/\n/, $_[0]);
}

sub plain {
    my ($path) = $_[0] =~ /^(\S+)/;
    $path =~ s/\\([0-7]{3})/chr(oct($1))/ge;
    return $path;
}

# The mount point of a mount that is not there any more as it was; undef where all are.
sub lost {
    my ($look) = @_;
    while ($moved && sysread($moved, my $events, 65536)) {
        while (length($events)) {
            my ($number, undef, undef, $length) = unpack("lLLL", $events);
            my $name = unpack("x16 Z*", substr($events, 0, 16 + $length, ""));
            $look = 1 if $number < 0;    # there were too many of them
            for (@{$places{$number} || []}) { return "$_$name" if $kept{"$_$name"}; }
        }
    }
    $look or return undef;
    my (%was, %is) = facts($first);
    %is = facts(table());
    for my $id (keys(%was)) {
        my $now = delete($is{$id}) // "";
        return plain($was{$id}) if $now ne $was{$id};
    }
    return (map { plain($_) } values(%is))[0];
}

1;
