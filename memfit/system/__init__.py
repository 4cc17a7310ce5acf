"""What is below the product: files, texts of budgets, caches, C++ and compiled loops, the allocation recorder."""
