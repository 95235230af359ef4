"""What changed on the disk is refused where it is read, and quarantines its run alone."""
