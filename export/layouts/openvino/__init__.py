"""What OpenVINO's converter (optimum-intel) is given, and what came out of it, read back."""
