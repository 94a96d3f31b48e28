"""The `kvxfer` command: one module per subcommand."""
