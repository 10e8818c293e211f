"""Drafting by looking things up: n-gram stores, tries, suffix structures, searches over guesses."""
