"""Tools that maintain the repository; they are not part of the package."""
