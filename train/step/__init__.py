"""What a step computes with: optimizers, LoRA, chosen tokens, products, threads, compiled parts."""
