"""C++ for CPUs, compiled once on the machine that runs it."""
