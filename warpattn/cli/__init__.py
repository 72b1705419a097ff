"""The command line (extra `cli`): one module per subcommand, `spelling` for how options are written."""
