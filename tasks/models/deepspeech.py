"""DeepSpeech 2: a recurrent network from spectrograms to characters."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.basics.errors import ConfigError

__all__ = ["DeepSpeech"]

LARGEST_ACTIVATION = 20.0


class _FrameNorm(nn.BatchNorm1d):
    """Batch normalization over the real frames only; padding becomes zero."""

    def over(self, frames: Tensor, real: Tensor) -> Tensor:
        """Normalises frames.

        Args:
            frames: shape (batch, time, features, ...).
            real: bool, shape (batch, time).

        Returns:
            The shape of ``frames``.
        """
        normed: Tensor = self(frames[real])
        result = normed.new_zeros(frames.shape)
        result[real] = normed
        return result


class _Convolution(nn.Module):
    """Convolution over pitch and time, normalization and clipped ReLU; halves the number of bins.

    Padding frames go in as zeros and come out as zeros.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, int], time_stride: int) -> None:
        super().__init__()
        middle = (kernel[0] // 2, kernel[1] // 2)
        self.time_stride = time_stride
        self.convolution = nn.Conv2d(in_channels, out_channels, kernel, (2, time_stride), middle)
        self.norm = _FrameNorm(out_channels)

    def forward(self, images: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Maps (batch, channels, bins, time) and each item's real frames to the same of the output."""
        out = self.convolution(images).permute(0, 3, 1, 2)
        lengths = _halved(lengths, self.time_stride)
        out = self.norm.over(out, _real(lengths, out.shape[1]))
        return F.hardtanh(out, 0.0, LARGEST_ACTIVATION).permute(0, 2, 3, 1), lengths


def _halved(size: Tensor, stride: int) -> Tensor:
    """Output size of a convolution that is padded by half its odd kernel."""
    return (size - 1).div(stride, rounding_mode="floor") + 1


def _real(lengths: Tensor, time: int) -> Tensor:
    """Marks the frames that are no padding: bool, shape (batch, time)."""
    return torch.arange(time, device=lengths.device) < lengths.unsqueeze(1)


class DeepSpeech(nn.Module):
    """Two convolutions, unidirectional LSTM layers, a lookahead convolution and a linear layer.

    An utterance's result does not depend on how far the batch is padded. The LSTM layers also run over padding
    (it follows the real frames, so it has no effect): packed sequences are 3x slower on a CPU.

    Args:
        num_labels: characters and the blank.
        num_bins: of a spectrogram.
        hidden_size: units of each LSTM layer.
        num_layers: LSTM layers; all but the first normalize their input.
        channels: of the convolutions.
        time_strides: of the two convolutions; their product is how many frames become one.
        context: frames of the future that the lookahead convolution sees.

    Raises:
        ConfigError: there is no layer.

    Source: Amodei et al.: Deep Speech 2, ICML 2016; Wang et al.: Lookahead Convolution Layer for Unidirectional
    Recurrent Neural Networks, ICLR workshops 2016. With 29 labels, 161 bins and the default sizes it has the
    27,569,568 parameters of Li, Hoefler: Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022.
    """

    def __init__(
        self,
        num_labels: int,
        num_bins: int,
        hidden_size: int = 800,
        num_layers: int = 5,
        channels: int = 32,
        time_strides: tuple[int, int] = (2, 1),
        context: int = 20,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ConfigError(f"model.num_layers must be at least 1, got {num_layers}")
        self.context = context
        self.convolutions = nn.ModuleList(
            [
                _Convolution(1, channels, (41, 11), time_strides[0]),
                _Convolution(channels, channels, (21, 11), time_strides[1]),
            ]
        )
        features = channels * ((num_bins + 3) // 4)  # two strides of 2, each rounded up
        sizes = [features] + [hidden_size] * (num_layers - 1)
        self.lstms = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.norms = nn.ModuleList(_FrameNorm(hidden_size) for _ in range(num_layers))
        self.lookahead = nn.Conv1d(hidden_size, hidden_size, context + 1, groups=hidden_size, bias=False)
        self.decoder = nn.Linear(hidden_size, num_labels, bias=False)

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Scores characters.

        Args:
            spectrograms: float, shape (batch, num_bins, time); whatever is there after an utterance's end is ignored.
            lengths: int64, shape (batch,): the real frames.

        Returns:
            Logits, shape (batch, frames, num_labels), and how many frames of each are real, int64, shape (batch,).
        """
        out = (spectrograms * _real(lengths, spectrograms.shape[2]).unsqueeze(1)).unsqueeze(1)
        for convolution in self.convolutions:
            out, lengths = convolution(out, lengths)
        real = _real(lengths, out.shape[3])
        hidden = self._recur(out.permute(0, 3, 1, 2).flatten(2), real)
        logits: Tensor = self.decoder(hidden)
        return logits, lengths

    def _recur(self, frames: Tensor, real: Tensor) -> Tensor:
        """The LSTM layers and the view ahead: (batch, time, features) to (batch, time, hidden_size)."""
        *between, last = (cast(_FrameNorm, norm) for norm in self.norms)
        for lstm, norm in zip(self.lstms, [*between, None], strict=True):
            frames, _ = lstm(frames)
            if norm is not None:
                frames = norm.over(frames, real)
        ahead = F.pad((frames * real.unsqueeze(2)).transpose(1, 2), (0, self.context))
        seen = F.hardtanh(self.lookahead(ahead), 0.0, LARGEST_ACTIVATION)
        return last.over(seen.transpose(1, 2), real)
