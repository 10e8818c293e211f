"""What the commands do, as functions: `specctl.train`, `specctl.generate` and the others. They take
names as well as objects, speak only to a `progress` that was given, and raise SpecctlError. The
command line turns words into a call and shows its result."""
