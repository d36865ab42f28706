"""Running a program that nobody has reviewed: see `program`."""
