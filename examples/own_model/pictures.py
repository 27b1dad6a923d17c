"""A torchvision model on your own pictures, with one folder per class: PICTURES/train/CLASS and PICTURES/test/CLASS.

From a folder with this file and conf/, with spardl cloned to SPARDL (plugins= allows the code of this module):

PYTHONPATH=. python SPARDL/train.py --config-dir conf "plugins=[pictures]" model=my_cnn dataset.root=PICTURES
"""

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from tasks.datasets.images import ImageDataset


class Pictures:
    slow = True  # the trainer decodes the pictures of the next step in a thread

    def __init__(self, root, size):
        steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
        self.files = ImageFolder(root, transforms.Compose(steps))

    def __len__(self):
        return len(self.files)

    def batch(self, indices, generator):  # the generator is None in evaluations
        images, labels = zip(*(self.files[index] for index in indices.tolist()), strict=True)
        if generator is not None and torch.rand(1, generator=generator).item() < 0.5:
            images = [image.flip(-1) for image in images]
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def load(root, size):
    train, test = (Pictures(f"{root}/{split}", size) for split in ("train", "test"))
    return ImageDataset("my_pictures", train, test, len(train.files.classes), in_channels=3, image_size=size)


def build(num_classes, in_channels, image_size):
    return resnet18(num_classes=num_classes)
