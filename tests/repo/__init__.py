"""The rules of DESIGN.md, as tests on the repository itself."""
