"""Positions: rotary embeddings and scalings, ALiBi slopes, relative position tables."""

from .alibi import alibi_slopes as alibi_slopes
from .axes import Axial as Axial
from .axes import Sections as Sections
from .rotary import Layout as Layout
from .rotary import Rotary as Rotary
from .rotary import rotary_angles as rotary_angles
from .rotary import rotate as rotate
from .scaling import DynamicScaling as DynamicScaling
from .scaling import Frequencies as Frequencies
from .scaling import LinearScaling as LinearScaling
from .scaling import Llama3Scaling as Llama3Scaling
from .scaling import LongRope as LongRope
from .scaling import Proportional as Proportional
from .scaling import Scaling as Scaling
from .scaling import Yarn as Yarn
