"""What others printed, published and do: facts to compare with, and the arithmetic that reads them."""
