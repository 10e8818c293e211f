"""Run folders and the stages of pipelines."""
