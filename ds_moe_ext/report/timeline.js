// SPDX-License-Identifier: Apache-2.0
// The timeline of a step: zoom, pan, who waited for whom. It draws what is in sight anew.
const ROW=26,BOX=20;
const time=us=>us<.05?'0 s':us>=1e6?+(us/1e6).toPrecision(4)+' s':us>=1e3?+(us/1e3).toPrecision(4)+' ms'
 :+us.toPrecision(3)+' \u00b5s';
const round=rough=>{const power=10**Math.floor(Math.log10(rough));
 return power*[1,2,5,10].find(m=>m*power>=rough)};
const escape=text=>text.replace(/[&<>"]/g,c=>'&#'+c.charCodeAt(0)+';');
document.querySelectorAll('.timeline').forEach(figure=>{
 const {kinds,numLanes,places,passes,tasks,last,length}=JSON.parse(figure.querySelector('script').textContent);
 const plot=figure.querySelector('.plot'),axis=figure.querySelector('.steps');
 let from=0,to=length,chosen=null,pointed=null,isAsked=false;
 // A task: kind, lane, place, chunk, start, length, the task that it waited for last, or null.
 const chain=i=>{const found=[];for(;i!==null;i=tasks[i][6])found.push(i);return found};
 const width=()=>plot.clientWidth||1;
 const x=us=>(us-from)/(to-from)*width();
 const y=task=>(1+task[1])*ROW;
 const name=i=>kinds[tasks[i][0]][0]+(places[tasks[i][2]]?', '+places[tasks[i][2]]:'');
 const box=(start,long,top,style,labels,more)=>{
  const left=Math.max(x(start),-9),right=Math.min(x(start+long),width()+9),wide=right-left;
  if(right<0||left>width())return '';
  const label=labels.find(one=>wide>6.7*one.length+9);
  const ink=style.match(/^k(\w+)/);
  return '<rect class="'+style+'" x="'+left.toFixed(1)+'" y="'+(top+3)+'" width="'
   +Math.max(wide,.5).toFixed(1)+'" height="'+BOX+'" rx="'+Math.min(2,wide/4)+'" '+more+'/>'+(label
    ?'<text class="'+(ink?'t'+ink[1]:'')+'" x="'+(Math.max(left,0)+5).toFixed(1)+'" y="'
     +(top+17)+'">'+escape(label)+'</text>':'')};
 const arrow=(i,style)=>{const task=tasks[i],by=task[6]===null?null:tasks[task[6]];
  if(!by)return '';
  const x1=x(by[4]+by[5]),x2=x(task[4]),y1=y(by)+13,y2=y(task)+13,bend=Math.max(12,(x2-x1)/2);
  if(Math.max(x1,x2)<-50||Math.min(x1,x2)>width()+50)return '';
  return '<path class="arrow '+style+'" d="M'+x1.toFixed(1)+' '+y1+'C'+(x1+bend).toFixed(1)+' '+y1
   +' '+(x2-bend).toFixed(1)+' '+y2+' '+x2.toFixed(1)+' '+y2+'m-5 -3.5l5 3.5l-5 3.5"/>'};
 const draw=()=>{isAsked=false;
  const step=round((to-from)/6),free=Array(numLanes).fill(-1),svg=[],names=[];
  for(let us=Math.ceil(from/step)*step;us<=to+step/1e6;us+=step){const at=100*(us-from)/(to-from);
   svg.push('<line x1="'+at+'%" x2="'+at+'%" y1="0" y2="100%"/>');
   names.push('<span class="'+(at<4?'first':at>96?'last':'')+'" style="left:'+at+'%">'+time(us)
    +'</span>')}
  passes.forEach(([short,phase,place,start,long],i)=>
   svg.push(box(start,long,0,'pass-box',[short+' '+phase,short],'data-pass="'+i+'"')));
  const marked=new Set(chosen===null?[]:chain(chosen));
  tasks.forEach((task,i)=>{const end=x(task[4]+task[5]);
   // What lies on pixels that are taken is left out, but for what is marked.
   if(task[4]+task[5]<from||task[4]>to||end<free[task[1]]+.4&&!marked.has(i))return;
   free[task[1]]=Math.max(end,free[task[1]]);
   const [kind,style]=kinds[task[0]];
   svg.push(box(task[4],task[5],y(task),style+' task'+(marked.size&&!marked.has(i)?' pale':''),
    [(kind+' '+task[3]).trim(),task[3]],'data-task="'+i+'"'))});
  marked.forEach(i=>svg.push(arrow(i,'')));
  if(pointed!==null)svg.push(arrow(pointed,'strong'));
  plot.innerHTML=svg.join('');axis.innerHTML=names.join('')};
 const ask=()=>{if(!isAsked){isAsked=true;requestAnimationFrame(draw)}};
 const move=(start,long)=>{long=Math.min(Math.max(long,Math.min(1,length)),length);
  from=Math.min(Math.max(start,0),length-long);to=from+long;ask()};
 const zoom=(by,share=.5)=>{const at=from+share*(to-from);move(at-share*(to-from)*by,(to-from)*by)};
 const choose=i=>{chosen=i;path.setAttribute('aria-pressed',i===last);ask()};
 const told=i=>{const [,,,chunk,start,long,by]=tasks[i];
  return name(i)+(chunk?', chunk '+chunk:'')+'\n'+time(long)+', from '+time(start)+' to '
   +time(start+long)+(by===null?'':'\nwaited last for '+name(by)+', which ended '
   +time(Math.max(0,start-tasks[by][4]-tasks[by][5]))+' before')};
 const tools=document.createElement('div');tools.className='tools';
 const button=(text,title,act)=>{const made=document.createElement('button');made.textContent=text;
  made.title=title;made.type='button';made.addEventListener('click',act);tools.append(made);
  return made};
 button('+','zoom in (+)',()=>zoom(.5));button('\u2212','zoom out (-)',()=>zoom(2));
 button('\u25c0','back (left)',()=>move(from-(to-from)/4,to-from));
 button('\u25b6','on (right)',()=>move(from+(to-from)/4,to-from));
 button('Whole step','reset (0)',()=>move(0,length));
 const path=button('Critical path','from the last task back, each to the one it waited for (c)',
  ()=>choose(chosen===last?null:last));
 tools.insertAdjacentHTML('beforeend','<span>Drag to move; Ctrl and wheel, or two fingers, to zoom; '
  +'a click on a task shows what it waited for, on a layer brings that.</span>');
 figure.prepend(tools);
 const share=event=>{const held=plot.getBoundingClientRect();return (event.clientX-held.left)/held.width};
 const fingers=new Map();let moved=0;
 plot.addEventListener('wheel',event=>{
  if(event.ctrlKey||event.metaKey){event.preventDefault();zoom(Math.exp(event.deltaY/200),share(event))}
  else if(Math.abs(event.deltaX)>Math.abs(event.deltaY)){event.preventDefault();
   move(from+event.deltaX/width()*(to-from),to-from)}},{passive:false});
 plot.addEventListener('pointerdown',event=>{fingers.set(event.pointerId,event.clientX);moved=0});
 addEventListener('pointerup',event=>fingers.delete(event.pointerId));
 addEventListener('pointercancel',event=>fingers.delete(event.pointerId));
 addEventListener('pointermove',event=>{const before=fingers.get(event.pointerId);
  if(before===undefined)return;
  const by=event.clientX-before,[a,b]=[...fingers.values()];
  fingers.set(event.pointerId,event.clientX);moved+=Math.abs(by);
  if(fingers.size===1){move(from-by/width()*(to-from),to-from);return}
  const [c,d]=[...fingers.values()];
  const middle=((c+d)/2-plot.getBoundingClientRect().left)/width();
  zoom(Math.max(Math.abs(a-b),9)/Math.max(Math.abs(c-d),9),middle)});
 plot.addEventListener('mousemove',event=>{
  const {task,pass}=event.target.dataset,before=pointed;
  pointed=task===undefined||fingers.size?null:+task;
  if(pointed!==before)ask();
  if(fingers.size||task===undefined&&pass===undefined)tip.hidden=true;
  else show(event,pointed===null?places[passes[pass][2]]+'\n'+time(passes[pass][4]):told(pointed))});
 plot.addEventListener('mouseleave',()=>{pointed=null;tip.hidden=true;ask()});
 plot.addEventListener('click',event=>{if(moved>4)return;
  const {task,pass}=event.target.dataset;
  if(pass!==undefined)move(passes[pass][3]-passes[pass][4]*.05,passes[pass][4]*1.1);
  else choose(task===undefined||+task===chosen?null:+task)});
 plot.addEventListener('dblclick',()=>move(0,length));
 const keys={'+':()=>zoom(.5),'=':()=>zoom(.5),'-':()=>zoom(2),'0':()=>move(0,length),
  ArrowLeft:()=>move(from-(to-from)/8,to-from),ArrowRight:()=>move(from+(to-from)/8,to-from),
  c:()=>path.click(),Escape:()=>choose(null),
  ArrowUp:()=>choose(chosen===null?last:tasks[chosen][6]??chosen)};
 plot.setAttribute('tabindex','0');
 plot.addEventListener('keydown',event=>{const act=keys[event.key];
  if(act&&!event.ctrlKey&&!event.metaKey){event.preventDefault();act()}});
 new ResizeObserver(ask).observe(plot);draw()});
