"""The command line (extra `cli`): one module per subcommand; `spelling` parses options."""
