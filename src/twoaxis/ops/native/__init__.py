"""Operators in C++ for CPUs, compiled on first use by the system's compiler; `ops.choice` says when they run."""
