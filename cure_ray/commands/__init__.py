"""The subcommands of `cure-ray`, one module each. They read options, call the library, print."""
