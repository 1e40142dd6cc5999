"""What the scripts in labs/ share: arguments, ranks, launching, and measuring table 2."""
