"""Child processes with limits: one child, a pool of them, and the sandbox for programs that models wrote."""
