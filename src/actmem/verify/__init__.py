"""Where a plan's bill meets a count: an emulated rank runs the real model, and each line is compared."""
