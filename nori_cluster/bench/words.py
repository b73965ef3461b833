"""256 common English words for chat prompts: with a space before it, each is one token of SmolLM2's vocabulary."""

_TEXT = """
time person year way day thing man world life hand part child eye woman place work week case point company
number group problem fact be have do say get make go know take see come think look want give use find tell ask
seem feel try leave call good new first last long great little own other old right big high different small
large next early young important few public bad same able about after again against all also always another
any area around away back because become before begin behind between body book both boy bring build business
but can car care carry change city class clear close cold color common community course cover cut dark deal
death deep development door down draw drive during each east eat economy education effect end energy enough
even evening every example face family far father fire five floor food foot force form four free friend from
front full game general girl glass green ground grow half happy hard head health hear heart heat help here
history hold home hope horse hot hour house however human hundred idea inside interest island issue job join
just keep kind king land language late law lead learn left less letter level light line list live local love
low machine main many map mark market matter may mean measure meet member method middle might mile mind minute
money month moon more morning most mother mountain move much music must name nature near need never night
north note nothing now object ocean off office
"""
WORDS = tuple(_TEXT.split())
