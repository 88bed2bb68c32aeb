from torchvision.io import __getattr__ as __getattr__
