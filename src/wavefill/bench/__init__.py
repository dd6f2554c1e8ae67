"""Measurement: the kernel suite, host overhead, and whole models; none of it is used by the library itself."""
