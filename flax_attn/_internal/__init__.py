"""What stands below everything: frozen types, arrays, checks, and printing."""
