"""Executes a program: roles, schedules, barriers, deadlocks."""
