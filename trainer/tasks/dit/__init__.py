"""Diffusion transformers: the model, the diffusion process, the criterion, and the tasks that train on images."""
