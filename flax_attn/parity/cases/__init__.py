"""Cases: lists of pairs to prove, how they are found, recorded, proven and written down."""
