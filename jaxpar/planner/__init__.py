"""The planner: which of all legal plans is the fastest that fits, and why."""
