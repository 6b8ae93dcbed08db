"""Tools for those who work on Phalanx; not part of any wheel."""
