"""Small language models that draft, alone or with drafts of their own."""
