"""Predicted time and bytes of communication: does compression pay, and which way to train does.

Nothing is run. Bytes are asked of the wire formats, exchanges and outer optimizers themselves, also
of a user's own.
"""

from jrc.advice._communication_advice import CommunicationAdvice as CommunicationAdvice
from jrc.advice._communication_advice import WayCost as WayCost
from jrc.advice._communication_advice import communication_advice as communication_advice
from jrc.advice._dgc_advice import dgc_advice as dgc_advice
from jrc.advice._dgc_advice_table import DGCAdvice as DGCAdvice
from jrc.advice._dgc_advice_table import ExchangeCost as ExchangeCost
