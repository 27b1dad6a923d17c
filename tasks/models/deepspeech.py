"""DeepSpeech 2: a recurrent network that predicts characters from spectrograms."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.basics.errors import ConfigError

__all__ = ["DeepSpeech"]

LARGEST_ACTIVATION = 20.0


class _FrameNorm(nn.BatchNorm1d):
    """Batch normalization over the real frames (without padding); padding becomes zero."""

    def over(self, frames: Tensor, real: Tensor) -> Tensor:
        """Normalizes frames.

        Args:
            frames: Frames of shape (batch, time, features, ...).
            real: True for frames, False for padding: bool, shape (batch, time).

        Returns:
            Normalized frames, of the same shape.
        """
        normed: Tensor = self(frames[real])
        result = normed.new_zeros(frames.shape)
        result[real] = normed
        return result


class _Convolution(nn.Module):
    """Convolution over frequency and time, normalization and clipped ReLU; halves the number of frequency bins.

    Padding frames are zeros in the input and in the output.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, int], time_stride: int) -> None:
        super().__init__()
        middle = (kernel[0] // 2, kernel[1] // 2)
        self.time_stride = time_stride
        self.convolution = nn.Conv2d(in_channels, out_channels, kernel, (2, time_stride), middle)
        self.norm = _FrameNorm(out_channels)

    def forward(self, images: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Applies convolution, normalization and activation.

        Args:
            images: Input of shape (batch, channels, bins, time).
            lengths: Number of frames of each utterance, without padding: int64, shape (batch,).

        Returns:
            Output of shape (batch, channels, bins, time), and its number of frames for each utterance, shape (batch,).
        """
        out = self.convolution(images).permute(0, 3, 1, 2)
        lengths = _halved(lengths, self.time_stride)
        out = self.norm.over(out, _real(lengths, out.shape[1]))
        return F.hardtanh(out, 0.0, LARGEST_ACTIVATION).permute(0, 2, 3, 1), lengths


def _halved(size: Tensor, stride: int) -> Tensor:
    """Returns the output size of a convolution that is padded by half its odd kernel."""
    return (size - 1).div(stride, rounding_mode="floor") + 1


def _real(lengths: Tensor, time: int) -> Tensor:
    """Returns whether each frame is no padding: bool, shape (batch, time)."""
    return torch.arange(time, device=lengths.device) < lengths.unsqueeze(1)


class DeepSpeech(nn.Module):
    """Two convolutions, unidirectional LSTM layers, a lookahead convolution and a linear layer.

    The result of an utterance does not depend on the padding of the batch. The LSTM layers also read the padding, which
    has no effect because it follows the real frames; packed sequences would be 3x slower on a CPU.

    Args:
        num_labels: Number of labels: characters and the blank.
        num_bins: Number of frequency bins of a spectrogram.
        hidden_size: Number of units of each LSTM layer.
        num_layers: Number of LSTM layers; all except the first normalize their input.
        channels: Number of channels of the convolutions.
        time_strides: Strides over time of the two convolutions; their product is the number of input frames per output
            frame.
        context: Number of future frames that the lookahead convolution reads.

    Raises:
        ConfigError: If ``num_layers`` is below 1.

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
        """Computes the logits of characters for each frame.

        Args:
            spectrograms: Spectrograms: float, shape (batch, num_bins, time); values after the end of an utterance are
                ignored.
            lengths: Number of frames of each utterance: int64, shape (batch,).

        Returns:
            Logits, shape (batch, frames, num_labels), and the number of frames of each utterance, int64, shape
            (batch,).
        """
        out = (spectrograms * _real(lengths, spectrograms.shape[2]).unsqueeze(1)).unsqueeze(1)
        for convolution in self.convolutions:
            out, lengths = convolution(out, lengths)
        real = _real(lengths, out.shape[3])
        hidden = self._recur(out.permute(0, 3, 1, 2).flatten(2), real)
        logits: Tensor = self.decoder(hidden)
        return logits, lengths

    def _recur(self, frames: Tensor, real: Tensor) -> Tensor:
        """Applies LSTM layers and lookahead convolution: (batch, time, features) to (batch, time, hidden_size)."""
        *between, last = (cast(_FrameNorm, norm) for norm in self.norms)
        for lstm, norm in zip(self.lstms, [*between, None], strict=True):
            frames, _ = lstm(frames)
            if norm is not None:
                frames = norm.over(frames, real)
        ahead = F.pad((frames * real.unsqueeze(2)).transpose(1, 2), (0, self.context))
        seen = F.hardtanh(self.lookahead(ahead), 0.0, LARGEST_ACTIVATION)
        return last.over(seen.transpose(1, 2), real)
