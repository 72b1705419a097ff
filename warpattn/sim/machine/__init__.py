"""What executes a program: roles, schedules, barriers, deadlocks."""
