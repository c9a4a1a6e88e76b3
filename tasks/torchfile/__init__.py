"""The torch.save container: where the bytes of each tensor lie, without torch and without reading them."""
