"""Small programs that show how something is done, each runnable as it is."""
