# Which mount of a sandbox has ended. watcher.pl evaluates this once the kernel has reported a changed mount table or a
# rename, so its variables are here.

open(my $moved, "<&=", $moves) if $moves >= 0;

sub facts {
    return map { my @is = split(/ /, $_, 7); $is[4] =~ m{^/proc/} ? () : ($is[0], "@is[4,1,2,5]") } split(/\n/, $_[0]);
}

sub plain {
    my ($path) = @_;
    $path =~ s/\\([0-7]{3})/chr(oct($1))/ge;
    return $path;
}

# The mount point of a mount that is not there any more as it was; undef where all are.
sub lost {
    my ($look) = @_;
    while ($moved && sysread($moved, my $signals, 65536)) { $look = 1; }
    $look or return undef;
    my (%was, %is) = facts($first);
    %is = facts(table());
    my @lost;
    for my $id (keys(%was)) {
        my $now = delete($is{$id}) // "";
        next if $now eq $was{$id};
        my ($path, $other) = map { /^(\S+)/ ? $1 : "" } ($was{$id}, $now);
        # A mount beneath a folder that was moved is elsewhere with it.
        while ($other ne $path && $path =~ m{^(.+)(/[^/]+)$} && substr($other, -length($2)) eq $2 && length($other) > length($2)) {
            ($path, $other) = ($1, substr($other, 0, -length($2)));
        }
        push(@lost, $path);
    }
    return (sort { length($a) <=> length($b) } map { plain($_) } @lost ? @lost : map { /^(\S+)/ } values(%is))[0];
}

1;
