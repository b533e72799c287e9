"""The command attention-ext: a module for each subcommand, what they share, and nothing that the rest of the package imports."""
