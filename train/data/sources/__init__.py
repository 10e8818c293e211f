"""Where records come from: files and folders, the corpus, the target; what was left out."""
