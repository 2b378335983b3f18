"""A small trainer around `models`: real text, emulated devices, and a report of what balancing did."""
