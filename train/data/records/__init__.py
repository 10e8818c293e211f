"""One record: its layout, its messages and images, its tokens by a chat template."""
