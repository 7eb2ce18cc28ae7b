"""One step of a batch: its requests, the plan that all its layers share, and the planner that makes it."""
