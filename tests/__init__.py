"""The tests. A package, so that they import what they share by one name: `from tests.repo import rules`."""
